"""What a person reads: one module an output. These read a verdict and decide nothing."""
