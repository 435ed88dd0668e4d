"""One PPO step over three data planes: what bench_controller_bottleneck.py measures. Read payloads, graph, planes, in this order."""
