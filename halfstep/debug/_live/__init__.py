"""What a training loop shows while it runs."""
