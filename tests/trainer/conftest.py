import pytest

from torchtitan_npu_core import assets


@pytest.fixture(scope="session")
def shared_options(tmp_path_factory):
    """Options that every test job has: made text and tokenizer, float32, a fixed seed."""
    return [
        "--model.hf_assets_path",
        str(assets.tokenizer_folder()),
        "--training.dataset",
        "c4_test",
        "--training.dataset_path",
        str(assets.text_folder()),
        "--training.local_batch_size",
        "2",
        "--training.seq_len",
        "64",
        "--training.steps",
        "3",
        "--training.mixed_precision_param",
        "float32",
        "--debug.seed",
        "0",
        "--metrics.log_freq",
        "1",
        "--lr_scheduler.warmup_steps",
        "1",
        "--activation_checkpoint.mode",
        "none",
        "--job.dump_folder",
        str(tmp_path_factory.mktemp("dump")),
    ]
