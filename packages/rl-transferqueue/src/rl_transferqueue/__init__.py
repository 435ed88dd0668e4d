"""The data plane: controller, storage units with shared-memory arenas, client and replay buffer."""
