"""Step-time model and the search for the best use of devices."""
