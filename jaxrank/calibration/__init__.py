"""Maps from the outputs of a trained model to calibrated ones, fitted after training."""
