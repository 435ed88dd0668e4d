"""Puts and clears that survive the plane: between the ledger and the journal."""
