"""Random numbers of models, data sets and collate functions: where they are, and their secret seeds."""
