"""Training backends behind the PolicyBackend and CriticBackend ports."""
