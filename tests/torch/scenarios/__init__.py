"""PyTorch alone: see tests.scenarios."""
