"""Engines that send only changed elements, over another engine."""
