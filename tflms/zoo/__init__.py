"""Networks and data that the demo, the benches, the tests and the examples share.

``tflms.zoo.graphs`` builds training graphs for sessions, ``tflms.zoo.models`` Keras models, and
``tflms.zoo.data`` the images that they train on. Nothing here imports TensorFlow before a builder
is called.
"""

from __future__ import annotations
