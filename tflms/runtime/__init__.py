"""Everything that talks to TensorFlow: reads graphs, hands rewrites back, checks that they live."""
