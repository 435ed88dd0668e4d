"""Weight synchronisation from trainer to rollout: manifest, engines, registry and manager."""
