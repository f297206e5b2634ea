"""The losses of ``liger_kernel.chunked_loss``: those of :mod:`liger_multi.losses`.

``compiled`` is taken and changes nothing, and so does ``chunk_size`` of the losses: the loss of a
token, once it is known, is a handful of numbers, and logits are chunked by bytes whatever the
batch. The base classes call the loss of a subclass with chunks of log-probabilities of that size.
The preference losses return ``(loss, (chosen log-probabilities, rejected ones, mean of the chosen
logits, mean of the rejected ones, NLL of the chosen, ...))``; what is
returned with the loss has no gradient.
"""
