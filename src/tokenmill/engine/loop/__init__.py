"""The loop that turns requests into tokens: receive, schedule, launch, commit, publish."""
