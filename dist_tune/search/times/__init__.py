"""Times of candidates: this rank's samples, and the reports in which ranks reduce them."""
