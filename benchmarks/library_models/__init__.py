"""Models of Lightning libraries, each trained by a function that calls its library as a user does."""
