"""TensorFlow and Keras adapter."""
