"""A run: the controller, what it measures, what it resumes from and what it says."""
