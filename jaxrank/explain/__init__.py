"""The importance of each feature for a trained model."""
