"""Paged attention: what a call is, schedules, launches, and their device code.

A reader finds, for decode and prefill in Triton:

- the schedule in `schedule` and `schedule_device` (decode), `prefill_device` (a program a tile)
- the walk over pages in `walk_device`; of rows of 4 bits in `packed_walk_device`
- the dequantisation in `..dequantise_device`; of rows of 4 bits in `packed_words_device`
- the merge of partial sums in `merge_device`, for MLA too

For Hopper in Gluon, MLA's decode (`latent_decode_device`, of few heads `latent_few_device`) and
prefill (`hopper_prefill_device`):

- what groups of warps do, and their schedule, in `latent_groups_device` and
  `hopper_prefill_groups_device`
- the walk over pages in `latent_load_device` and `hopper_prefill_load_device`; of rows with their
  own scales in `hopper_prefill_scaled_device`
- the dequantisation in `latent_load_device` and `hopper_dequantise_device`
"""
