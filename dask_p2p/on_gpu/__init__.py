"""`map_on_gpu`: a function of parts of host arrays, which pass through a GPU."""
