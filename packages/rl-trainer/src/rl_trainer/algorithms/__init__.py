"""Pure algorithms: advantages over ragged numpy data, losses over torch tensors."""
