"""Even loads for the experts of a mixture, by a bias that selects or by a penalty."""
