"""What bench_weight_sync.py measures beside engines, and its bars."""
