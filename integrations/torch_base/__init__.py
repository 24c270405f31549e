"""Distributed optimizers of PyTorch, whatever library has started the ranks: that library is known as Peers alone."""
