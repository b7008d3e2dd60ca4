"""Whether ranks live, and where they are: beats and answers of threads, and what others make of them."""
