"""Models of public leaderboards, registered like models of users."""
