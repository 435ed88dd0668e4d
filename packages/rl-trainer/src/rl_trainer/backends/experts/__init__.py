"""Models with experts: their weights, which transformers holds in one parameter of a layer."""
