"""Where concrete classes meet: which class plays which role."""
