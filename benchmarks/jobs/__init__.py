"""Training scripts as people write them, and a watcher that times them from outside."""
