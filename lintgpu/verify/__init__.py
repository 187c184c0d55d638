"""Time the claims on a real GPU, and check the numbers."""
