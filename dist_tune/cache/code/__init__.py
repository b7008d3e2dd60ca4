"""What code is, read without running any of it: fingerprints, and the values and files that it depends on."""
