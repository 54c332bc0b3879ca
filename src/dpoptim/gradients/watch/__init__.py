"""What a model holds beside its gradients, which may not change."""
