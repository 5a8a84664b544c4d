"""How much each feature of a trained model matters."""
