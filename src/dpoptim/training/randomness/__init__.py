"""Random numbers of models, data sets and collate functions, from secret seeds."""
