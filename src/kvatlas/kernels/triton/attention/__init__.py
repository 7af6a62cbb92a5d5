"""Paged attention: arguments of a call, schedules, launches, and device code.

Decode and prefill in Triton:

- schedule: `step_schedule` and `schedule_device` (decode), `prefill_device` (one program per tile)
- selection of tokens for sparse attention: `select_device`, also for MLA on Hopper
- loop over pages: `walk_device`; for 4-bit rows `decode_packed_device`
- dequantisation: `..dequantise_device`; for 4-bit rows `packed_words_device`
- merge of partial results: `merge_device`, also for MLA

For Hopper in Gluon, MLA decode (`latent_decode_device`, for few heads `latent_few_device`) and
prefill (`hopper_prefill_device`):

- roles of warp groups, and their schedule: `latent_groups_device` and
  `hopper_prefill_groups_device`
- loop over pages: `latent_load_device` and `hopper_prefill_load_device`; for rows with a scale
  per row `hopper_prefill_scaled_device`
- dequantisation: `hopper_dequantise_device`, for MLA and for prefill
"""
