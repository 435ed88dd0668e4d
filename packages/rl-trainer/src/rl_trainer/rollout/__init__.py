"""How responses are generated: sessions, tool agents, the HTTP endpoint and the transformers
engine.
"""
