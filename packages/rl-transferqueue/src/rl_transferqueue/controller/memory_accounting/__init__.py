"""Free, reserved and committed bytes of the storage units: pure bookkeeping."""
