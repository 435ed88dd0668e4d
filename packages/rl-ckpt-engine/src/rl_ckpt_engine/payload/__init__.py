"""What a version consists of: manifest, digests, and helpers that move and hash its bytes."""
