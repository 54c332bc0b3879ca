"""Contents of a model beside its gradients: they may not change."""
