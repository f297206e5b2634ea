"""From a contract to a backend: operators, configuration, resolution, autograd, torch.library."""
