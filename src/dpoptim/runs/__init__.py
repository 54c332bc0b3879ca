"""One run from the command line: from a data set's name to model, certificate and report."""
