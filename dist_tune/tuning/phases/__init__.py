"""The phases of one tuning, which all ranks go through together."""
