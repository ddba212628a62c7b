"""Pages to look at: a run's, and a trace's; each is one file that fetches nothing."""
