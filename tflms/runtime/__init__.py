"""Everything that talks to TensorFlow: reading graphs, handing rewrites back, checking that they live."""
