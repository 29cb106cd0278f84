"""One case for each error class: the command that provokes it, or the facts to build it from where nothing here can.

`messages.toml` beside this holds the complete message of each. Classes go by their module and name without `extract.`.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PLAN = "plan --engine engine -o out --data "

COMMANDS: dict[str, str] = {
    # 2: usage
    "assets.NoSuchAsset": "plan nojob",
    "errors.BadValue": PLAN + "rows.parquet --limit -1",
    "errors.UnknownKey": "plan unknown.toml",
    "errors.UnreadableSpec": "plan broken.toml",
    "jobs.Missing": "run --data rows.parquet -o out",
    "storage.BadAddress": "status ftp://bucket/out",
    "job.NotAJob": "status gone",
    "job.DamagedJob": "status torn",
    "inspection.NothingToInspect": "inspect gone",
    "engine.layer_numbers.LayerTwice": PLAN + "rows.parquet --layers 2,-2",
    "engine.layer_numbers.NoSuchDecoderLayer": PLAN + "rows.parquet --layers 1,99",
    "planning.BeyondEngine": PLAN + "rows.parquet --max-input-tokens 64",
    "selection.BadSelection": PLAN + "rows.parquet --rows 1,1",
    "shards.schema.ColumnTaken": PLAN + "rows.parquet --carry row",
    "shards.schema.ColumnNotStorable": PLAN + "union.arrow --carry either",
    "text.chat.NoChatTemplate": PLAN + "rows.parquet --column chat --input messages",
    "text.policy.DoesNotApply": PLAN + "rows.parquet --column ids --input input_ids --prefix x",
    "text.policy.NoRoom": PLAN + "rows.parquet --max-input-tokens 1",
    "sample.SampleExists": "sample -o rows.parquet",
    "report_page.page.NotOurPage": "report out -o rows.parquet",
    "report_page.page.PageUnwritable": "report out -o nothing",
    "engine.builder.OutputExists": "build checkpoint -o engine",
    "tuning.plot.NoPictureFormat": "tune checkpoint -o new.toml --plot curve.jpg",
    # 3: source
    "sources.files.NoSuchFile": PLAN + "gone.parquet",
    "sources.files.NoFiles": PLAN + "nothing",
    "sources.files.DuplicateFile": PLAN + "rows.parquet --data ./rows.parquet",
    "sources.files.UnreadableFile": PLAN + "empty.parquet",
    "sources.formats.UnknownFormat": PLAN + "data.bin",
    "sources.formats.MixedFormats": PLAN + "mixed",
    "sources.formats.UnknownScheme": PLAN + "ftp://host/rows.parquet",
    "sources.hf.OneDatasetOnly": PLAN + "a --data b --format hf",
    "sources.columns.NoSuchColumn": PLAN + "rows.parquet --column txt",
    "sources.columns.AmbiguousColumn": PLAN + "twice.parquet",
    "sources.column_types.WrongInputType": PLAN + "rows.parquet --column n",
    "sources.column_types.TypesDiffer": PLAN + "drift --carry n",
    "sources.column_types.CastFailed": PLAN + "wide --carry n",
    "sources.column_types.NotReadableText": PLAN + "bytes.arrow --carry text",
    "sources.jsonl.BadLine": PLAN + "lines.jsonl",
    "text.id_column.BadTokenId": PLAN + "rows.parquet --column ids --input input_ids",
    "text.tokens.RowRefused": PLAN + "rows.parquet --on-null error",
    # 4: checkpoint and engine
    "engine.contract.NotAnEngine": "plan --engine nothing --data rows.parquet",
    "engine.model_config.NotACheckpoint": "build nothing -o new",
    "engine.model_config.UnknownModelType": "build unknown -o new",
    "engine.model_config.NotADecoder": "build encoder -o new",
    "engine.weights_files.NoWeights": "build bare -o new",
    "engine.weights_files.PickledWeights": "build pickled -o new",
    # 5: resume
    "job.ForeignDirectory": "run --engine engine --data rows.parquet -o mixed --reserve-bytes 0",
}

FACTS: dict[str, dict[str, Any]] = {
    "exporting.export.ExportDiffers": {"path": "export", "row": 7},
    "exporting.export.ExportIntoOutput": {"path": "out/npy"},
    "exporting.hf_directory.ColumnNotForDatasets": {
        "path": "out",
        "column": "span",
        "found": "month_day_nano_interval",
    },
    "exporting.loss_mask.NoLossMask": {"path": "out", "problem": "the job's input was text, not messages"},
    "exporting.request.OptionDoesNotApply": {"option": "context", "kind": "npy", "kinds": "saelens"},
    "exporting.state_columns.NoSuchLayer": {"path": "out", "layer": 2, "known": "final", "column": "layer_2"},
    "exporting.target.MissingPackage": {"kind": "lance", "package": "pylance"},
    "exporting.target.TargetCannotHold": {
        "path": "out",
        "problem": "states are int8",
        "kind": "lance",
        "advice": "Cast them: --cast float16",
    },
    "exporting.target.TargetNeeds": {
        "path": "out",
        "kind": "saelens",
        "needed": "states of every token",
        "advice": "Run the job with --kind tokens.",
    },
    "exporting.working_directory.ExportExists": {"path": "export", "problem": "not an export of this output"},
    "exporting.working_directory.ExportIsBusy": {"path": "export"},
    "exporting.working_directory.OtherExport": {
        "path": "export",
        "field": "kind",
        "found": "npy",
        "expected": "parquet",
    },
    # 2: usage
    "derivation.NothingToPool": {"path": "out", "found": "last", "expected": "mean"},
    "derivation.SameDirectory": {"path": "out"},
    "engine.build_plan.WhichCard": {"checkpoint": "checkpoint"},
    "engine.builder.NoOwnDecoder": {
        "where": "options",
        "reason": "bloom: our packed decoder does not know alibi = true; transformers' own model runs it",
    },
    "engine.builder.RecipeDoesNotFit": {
        "where": "recipe.toml",
        "key": "max_input_tokens",
        "found": 4096,
        "expected": "at most 2048 (max_position_embeddings)",
    },
    "engine.layer_numbers.LayersNotGiven": {"runtime": "tensorrt-llm"},
    "engine.tensorrt_builder.CardTooSmall": {"found": 80, "name": "NVIDIA L4", "expected": 22.5},
    "engine.tensorrt_builder.VendorPrecision": {"found": "bfloat16", "path": "checkpoint-fp8", "expected": "fp8"},
    "engine.tiers.NoTiers": {"runtime": "torch"},
    "fidelity_check.measure.NothingToHold": {"option": "--max-kl", "problem": "checkpoint holds no output head"},
    "fidelity_check.dealt_rows.TooFewRows": {"found": 5, "expected": 8},
    "embedding.NoSuchPrompt": {"checkpoint": "org/model", "found": "passage", "known": "It has: query, document."},
    "shards.views.NotStored": {"layer": 1, "known": "2, 15"},
    "output.NoSuchRow": {"path": "out", "row": 20, "problem": "the last one is 19"},
    "output.RanksMayDiffer": {"path": "out", "problem": "shard 3 is missing"},
    "storage.refusals.ForkedProcess": {"path": "s3://bucket"},
    "training_views.columns.NotInOutput": {"path": "out", "name": "lable", "known": "label, row, id, hidden_states"},
    "training_views.gathering.NoNumber": {"row": 7, "name": "label"},
    "training_views.rows.NotFinished": {"path": "out", "shard": 3, "known": "3 of 12"},
    "planning.StatesNotGiven": {"found": "tokens", "expected": "last"},
    "quantizing.QuantizedExists": {"path": "checkpoint-fp8"},
    "reprocessing.NothingChosen": {"path": "out", "asked": "non_finite"},
    "runners.layer_trial.LayersOverflow": {"layer": 8, "found": 98_538.0, "dtype": "float16", "largest": 65_504.0},
    "sample.NoPassages": {"path": "lib/python3.13"},
    "storage.refusals.NoConditionalWrites": {"path": "s3://bucket/out"},
    "storage.refusals.StoreRefused": {
        "path": "s3://bucket",
        "problem": "no such bucket (NoSuchBucket)",
        "advice": "Create it, or check the name and AWS_ENDPOINT_URL.",
    },
    "storage.scratch.ForeignScratch": {"path": "/tmp/extract-0"},
    "storage.scratch.NoScratch": {"path": "/tmp/extract-0/0123456789abcdef", "problem": "No space left on device"},
    "store.CannotWrite": {"path": "out", "problem": "Read-only file system"},
    "store.NoHardLinks": {"path": "out", "problem": "Operation not permitted"},
    "text.policy.NoSuchSpecialToken": {"found": "bos", "missing": "BOS", "adds": "nothing"},
    "text.tokens.NoTokenizer": {"path": "engine", "input": "text"},
    "tuning.recipe_file.TuningExists": {"path": "recipe.toml", "option": "-o", "writer": "extract tune"},
    "tuning.search.BadThreads": {"found": 0},
    "tuning.search.NoSuchPrecision": {"found": "fp4", "device": "cpu", "expected": "float32, bfloat16, int8"},
    "tuning.search.NotOfThisRuntime": {"runtime": "tensorrt-llm"},
    "tuning.search.NothingToChoose": {"found": "float32", "dtype": "bfloat16", "advice": "bfloat16"},
    # 3: source
    "fidelity_check.rows.NothingToCompare": {"rows": "rows.parquet", "count": 8},
    "quantizing.NoCalibrationRows": {"source": "rows.parquet", "count": 512, "column": "text"},
    "sources.files.UnreadableDirectory": {"path": "rows/more", "problem": "Permission denied"},
    "sources.fingerprints.SourceChanged": {
        "path": "rows.parquet",
        "field": "size",
        "expected": "1,024",
        "found": "2,048",
    },
    "sources.hf.DatasetUnavailable": {
        "path": "org/none",
        "problem": "no such file or directory, and no Hugging Face dataset that can be loaded: not on the hub",
    },
    "sources.objects.UnreachableSource": {
        "path": "s3://bucket/rows.parquet",
        "problem": "the store does not answer",
        "advice": "Check the network and AWS_ENDPOINT_URL.",
    },
    "sources.hf.NoSuchSplit": {"path": "saved", "split": "dev", "splits": "train, test"},
    "sources.parquet.EncryptedParquet": {
        "path": "rows.parquet",
        "what": 'column "text"',
        "otherwise": ", or name another column",
    },
    "text.text_column.WrongColumnType": {"found": "int64", "input": "text", "expected": "strings or bytes"},
    # 4: checkpoint and engine
    "embedding.OtherCheckpoint": {
        "path": "engine",
        "found": "SmolLM2",
        "found_sha256": "0123456789ab",
        "expected": "org/model",
        "expected_sha256": "cdef01234567",
    },
    "engine.embedding_settings.NotApplied": {
        "path": "model/modules.json",
        "found": "it lists a module sentence_transformers.models.Dense (2_Dense)",
        "advice": "For the decoder's own states: extract build and extract run.",
    },
    "engine.fetching.UnreachableEngine": {
        "path": "s3://bucket/engine/contract.json",
        "problem": "no permission (AccessDenied)",
        "advice": "Allow it, or check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL.",
    },
    "cpu.architecture.DamagedArchitecture": {"path": "engine/decoder.json", "problem": "it is not JSON"},
    "cpu.mapped_weights.DamagedWeights": {
        "path": "engine/model.safetensors",
        "problem": "ends after 512 of 1024 bytes",
    },
    "cuda.loading.WeightsCut": {"path": "engine/model.safetensors", "found": 512, "start": 1024, "expected": 4096},
    "cuda.packaged_regions.CompiledCodeUnreadable": {
        "path": "engine/regions.pt2",
        "problem": "it has none for Gated of this decoder",
    },
    "cuda.packaged_regions.CompiledForAnother": {
        "path": "engine/regions.pt2",
        "field": "torch",
        "expected": "2.13.0",
        "found": "2.14.0",
    },
    "cuda.trusted_code.CodeNotTrusted": {
        "path": "engine/regions.pt2",
        "found": "0123456789ab",
        "variable": "EXTRACT_TRUST_CODE",
    },
    "cpu.mapped_weights.UnfitWeights": {
        "path": "engine/model.safetensors",
        "tensor": "norm.weight",
        "problem": "has shape [64], expected [128]",
    },
    "cpu.native.NoNativeKernels": {"precision": "int8", "problem": "this CPU has no AVX-512 VNNI"},
    "cpu.native_library.CompilerFailed": {"compiler": "g++", "code": 1, "said": "error: no such instruction"},
    "engine.checkpoint.AdapterRefused": {
        "path": "lora",
        "found": "it is",
        "base": "org/model",
        "otherwise": ", or the base alone",
    },
    "engine.checkpoint_tokenizer.UnusableTokenizer": {"path": "checkpoint", "problem": "tokenizer.json is not JSON"},
    "engine.contract.NoLayerStates": {
        "model": "gemma3n_text",
        "problem": "no list of modules runs once for each of its 4 layers",
    },
    "engine.comparison.NotFaithful": {"name": "llama", "found": 2e-3, "expected": 1e-5},
    "engine.contract.EngineChanged": {
        "path": "engine",
        "name": "model.safetensors",
        "field": "size",
        "found": 1023,
        "expected": 1024,
    },
    "engine.contract.EngineDoesNotFit": {
        "path": "engine",
        "field": "device",
        "expected": "cuda",
        "found": "cpu",
        "advice": "Build one for this machine.",
    },
    "engine.contract.SequenceTooLong": {"found": 1024, "expected": 128},
    "engine.contract.OutputDiffers": {"path": "engine", "field": "width", "found": 64, "expected": 128},
    "engine.decoder.CannotLoad": {"path": "checkpoint", "version": "5.24.0", "reason": "hidden_size is missing"},
    "engine.decoder.NonFiniteWeights": {
        "path": "checkpoint",
        "name": "norm.weight",
        "dtype": "float16",
        "shape": [64],
        "count": 3,
    },
    "engine.decoder.WeightsDoNotFit": {
        "path": "checkpoint",
        "architecture": "LlamaModel",
        "problem": "norm.weight is missing",
    },
    "engine.gguf_file.RefusedGguf": {
        "path": "model.gguf",
        "problem": "it ends within its header",
        "advice": "Fetch it again.",
    },
    "engine.hub_cache.NoSuchCheckpoint": {
        "name": "org/none",
        "problem": "not in the local cache, and the hub is offline",
        "advice": "Fetch it where there is a network.",
    },
    "engine.model_config.NeedsOwnCode": {"path": "checkpoint", "model_type": "own", "version": "5.24.0"},
    "engine.own_architecture.NoOwnArchitecture": {"family": "bloom", "option": "alibi", "value": "true"},
    "engine.quantization.QuantizedCheckpoint": {
        "path": "checkpoint",
        "method": "gptq",
        "bits": " (4 bits)",
        "install": "",
    },
    "engine.quantization.UnknownQuantization": {"path": "checkpoint", "problem": 'quant_method is "new"'},
    "engine.replay.ProbeFailed": {
        "path": "engine",
        "sequence": 1,
        "found": 2e-2,
        "expected": 1e-5,
        "here": "torch 2.13.0",
        "built": "torch 2.12.0",
    },
    "engine.row_trial.RowsTouch": {"name": "llama", "problem": "a row moves when its neighbour changes"},
    "engine.sentence_transformers.BadModules": {"path": "checkpoint", "problem": "modules.json names no transformer"},
    "engine.tensorrt_builder.QuantiseFirst": {"path": "checkpoint", "found": "bfloat16"},
    "engine.tensorrt_reference.NotAReference": {"path": "engine", "problem": "an engine in bfloat16"},
    "engine.tensorrt_reference.OtherReference": {
        "path": "other",
        "field": "hidden_size",
        "found": 64,
        "expected": 128,
    },
    "engine.torch_decoder.PackedRefused": {"family": "mamba2", "problem": "it has no attention"},
    "engine.torch_decoder.UnequalLengths": {"shortest": 3, "longest": 9},
    "engine.torch_final_norm.NoFinalNorm": {"family": "own", "last": "layers.3.mlp, layers.3"},
    "engine.torch_packed_pass.PackedAttentionRefused": {
        "module": "layers.0.self_attn",
        "found": "an attention bias",
        "expected": "none expected",
    },
    "engine.torch_proof.NotCausal": {"family": "own", "found": 0.3, "bound": 1e-5},
    "engine.torch_proof.NotExact": {"family": "own", "bound": 1e-5, "reasons": "packed: 0.2; dense: 0.1"},
    "engine.torch_proof.PlainModelFails": {"family": "own", "longest": 128, "problem": "index out of range"},
    "engine.weights_files.BrokenWeights": {"path": "model.safetensors", "problem": "ends after 512 of 1024 bytes"},
    "cpu.runtime.NoSuchLinear": {"path": "engine", "name": '"40.down"', "known": "layers 0 to 29"},
    "fidelity_check.layer_ranking.NotRankable": {
        "path": "engine",
        "problem": "it runs with transformers' own model; only our own decoder (on a CPU) has int8",
    },
    "fidelity_check.measure.ReferenceNotFinite": {"name": "checkpoint", "dtype": "float16", "row": 3},
    "fidelity_check.reference.NotOneModel": {
        "path": "engine",
        "field": "hidden_size",
        "expected": 128,
        "name": "other",
        "found": 64,
        "made_from": "org/model",
    },
    "patching.OtherKind": {"path": "modeling.py", "found": "all", "asked": "last", "tree": "vendor"},
    "patching.rewriting.OtherPatch": {
        "path": "modeling.py",
        "line": 7,
        "found": "version 9",
        "version": 1,
        "kinds": "all, last",
    },
    "patching.rewriting.SourceNotWritten": {"path": "modeling.py", "problem": "Read-only file system"},
    "patching.source_place.StructureNotKnown": {"path": "modeling.py", "problem": "forward returns nothing"},
    "patching.vendor_tree.NoVendorTree": {
        "tree": "vendor",
        "problem": "no such directory",
        "package": "tensorrt_llm",
    },
    "patching.vendor_tree.ReleaseNotCovered": {
        "path": "version.py",
        "found": "release 2.0.0",
        "releases": "1.0 to 1.2",
    },
    "quantizing.BadQuantization": {"name": "checkpoint", "field": "layers", "found": 3, "expected": 4},
    "quantizing.NotQuantizable": {"path": "model.gguf", "problem": "it is a GGUF file"},
    "pipeline.AnotherEngineLoaded": {"found": "0123abcd", "expected": "4567cdef"},
    "recomputation.NoPlainModel": {"path": "engine", "runtime": "tensorrt-llm"},
    "recomputation.OtherPlainModel": {"path": "other", "found": "0123abcd", "expected": "4567cdef"},
    "recomputation.OtherEngine": {"path": "engine", "found": "0123abcd", "expected": "4567cdef"},
    "tensorrt.engine_inputs.InputMissing": {"path": "engine", "name": "input_ids"},
    "tensorrt.engine_inputs.UnknownInput": {"path": "engine", "name": "lora_weights", "problem": "not known here"},
    "tensorrt.executor_runtime.RequestFailed": {"tokens": 128, "problem": "out of memory"},
    "tensorrt.gate.VendorDiffers": {"release": "1.1.0", "problems": "no class Session", "expected": "1.0 to 1.2"},
    "tensorrt.gate.VendorMissing": {"problem": "not installed", "releases": "1.0 to 1.2"},
    "tensorrt.gate.VendorRelease": {"found": "2.0.0", "expected": "1.0 to 1.2", "why": "it builds no engines"},
    "tensorrt.marked_model.NotReached": {
        "architecture": "OwnForCausalLM",
        "release": "1.1.0",
        "cls": "OwnModel",
        "problem": "which has no transformer",
    },
    "tensorrt.model_shape.NoShape": {"path": "checkpoint", "problem": "config.json has no hidden_size"},
    "tensorrt.open_runtime.NotLoaded": {"path": "engine", "release": "1.1.0", "problem": "out of memory"},
    "tensorrt.pass_limits.DoesNotFit": {
        "name": "llama",
        "weights": "16.0 GiB",
        "tokens": 65536,
        "needed": "30.0 GiB",
        "card": "24 GiB",
        "usable": "21.6 GiB",
        "advice": ", or fp8",
    },
    "tensorrt.pass_limits.RowTooLong": {"name": "llama", "longest": 4096, "tokens": 2048, "binding": "the card"},
    "tensorrt.session_runtime.PassRefused": {"tokens": 65536, "sequences": 512},
    "tensorrt.vendor_build.VendorBuildFailed": {"release": "1.1.0", "step": "build", "problem": "out of memory"},
    "tensorrt.vendor_checkpoint.NoReference": {"path": "checkpoint-fp8", "problem": "its checkpoint is not named"},
    "tensorrt.vendor_checkpoint.SplitCheckpoint": {"path": "checkpoint-fp8", "found": 2},
    "tensorrt.vendor_checkpoint.VendorWeightsMissing": {"path": "checkpoint-fp8", "name": "rank0.safetensors"},
    "tensorrt.vendor_quantizer.QuantiserFailed": {"release": "1.1.0", "name": "checkpoint", "problem": "no card"},
    "tensorrt.vendor_settings.SettingDropped": {
        "release": "1.1.0",
        "name": "max_seq_len",
        "expected": 128,
        "found": 2048,
    },
    "text.encoders.TokenizerChanged": {"path": "engine", "position": 4, "found": 17, "expected": 18},
    "text.encoders.TokenizerUnreadable": {"path": "engine", "problem": "tokenizer.json is not JSON"},
    "text.tokenizer_export.TokenizerDiffers": {
        "name": "checkpoint",
        "text": "'a  b'",
        "setting": "special tokens",
        "position": 1,
        "found": 17,
        "expected": 18,
    },
    "text.tokenizer_export.TokenizerNotExported": {"name": "checkpoint", "problem": "it is written in Python"},
    "tuning.card_tiers.NoTierBuilt": {"checkpoint": "checkpoint", "budget": 8192, "reason": "the build failed"},
    "tuning.search.NothingMeasured": {"checkpoint": "checkpoint", "precisions": "float32", "reason": "out of memory"},
    # 5: resume
    "derivation.Unfinished": {"path": "out", "problem": "3 of 10 shards are committed"},
    "job.OtherJob": {"path": "out", "field": "states.dtype", "found": "float16", "expected": "float32"},
    "runners.workers.TooManyWorkers": {"workers": 4, "cards": 2, "advice": "Start one worker a card."},
    # 6: shards that failed
    "planning.EnginesDiffer": {
        "field": "output.width",
        "found": 64,
        "expected": 32,
        "advice": "Build them from one checkpoint in one precision",
    },
    "runners.ray_cluster.NoCluster": {"address": "10.0.0.1:6379", "problem": "it does not answer"},
    "runners.ray_cluster.RayMissing": {"problem": "does not import (No module named ray)"},
    "runners.ray_driver.ShardsLost": {
        "path": "out",
        "failed": 1,
        "shards": 10,
        "details": "shard 3: no progress for 1,800 s",
    },
    "runners.finalizing.ShardsMissing": {"path": "out", "missing": 3, "shards": 10, "which": "2, 7-8"},
    "runners.session.StreamHasNoShards": {"what": "--worker-index"},
    "runners.stripes.NoSuchStripe": {"index": 4, "last": 3, "count": 4},
    "runners.workers.WorkersDied": {"path": "out", "details": "shard 3: worker 0 died (signal 9)"},
    "runners.summary.SomeShardsFailed": {
        "path": "out",
        "failed": 1,
        "shards": 10,
        "details": "shard 3: RuntimeError: no such kernel",
    },
    "shards.sink.NonFiniteStates": {
        "shard": 3,
        "row": 49,
        "place": "token 2",
        "bad": 5,
        "width": 64,
        "dtype": "float16",
        "nan": 0,
        "inf": 0,
        "over": 5,
        "largest": 65504.0,
        "advice": "Store bfloat16 or float32.",
    },
    "shards.sink.ZeroState": {"shard": 3, "row": 49},
    # 7: verification
    "storage.local_copies.DamagedObject": {
        "path": "s3://bucket/out/data/shard-00000-0123abcd.arrow",
        "problem": "1,000 bytes found, 2,000 were written",
        "root": "s3://bucket/out",
    },
    "commits.BadRecord": {"path": "out/commits/shard-00003.json", "problem": "it is not JSON", "job": "out"},
    "fidelity_check.budget.BudgetNotConfirmed": {
        "engine": "engine",
        "found": "3.10e-03 [2.90e-03, 3.30e-03]",
        "budget": 0.003,
        "looks": 3,
    },
    "fidelity_check.budget.BudgetNotReached": {
        "engine": "engine",
        "found": "3.10e-04 [2.90e-04, 3.30e-04]",
        "budget": 0.0001,
    },
    "fidelity_check.measure.TooFar": {"engine": "engine", "found": "0.02", "target": 0.01, "noise": ""},
    "manifest.NotTiled": {"path": "out", "problem": "rows 10 to 19 are missing"},
    "shards.shard_file.DamagedShard": {
        "path": "out/data/shard-00003-0a1b2c3d.arrow",
        "problem": "its footer is cut",
        "root": "out",
    },
    "verification.BadShards": {
        "path": "out",
        "count": 1,
        "problems": "  shard 3: the file is missing",
        "advice": "Make them again: extract verify --repair out",
    },
    # 8: space
    "storage.refusals.StoreFull": {"path": "s3://bucket/out/data/shard-00000-0123abcd.arrow", "code": "QuotaExceeded"},
    "engine.contract.PassOutOfMemory": {"tokens": 65536, "sequences": 512, "device": "cuda"},
    "engine.plain.NoRoomForEngine": {"path": "engine", "expected": 2048, "found": 1024},
    "estimate.DiskTooSmall": {"path": "out", "needed": 2048, "reserve": 4096, "free": 1024},
    "publishing.ReserveReached": {"path": "out", "free": 1024, "reserve": 4096},
    "report.NotPrinted": {"problem": "No space left on device"},
    "store.DiskFull": {"path": "out", "problem": "No space left on device", "free": 0},
    "tuning.search.NoPassFits": {"checkpoint": "checkpoint", "budget": 128, "device": "this machine"},
    # 130: interrupted
    "runners.interrupts.StopRequested": {"committed": "3 of 10", "path": "out"},
}


def plant(directory: Path, engine: Path, checkpoint: Path) -> None:
    """The files that the commands name."""
    (directory / "engine").symlink_to(engine)
    (directory / "checkpoint").symlink_to(checkpoint)
    for name in ("nothing", "mixed", "drift", "wide", "unknown", "encoder", "bare", "pickled", "torn"):
        (directory / name).mkdir()
    for name in ("unknown", "encoder"):
        (directory / name / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    chat = [[{"role": "user", "content": "hi"}]] * 2
    rows = pa.table({"text": ["a", None], "n": [1, 2], "row": [1, 2], "ids": [[1, 2], [3, 10**6]], "chat": chat})
    for name in ("rows.parquet", "mixed/0.parquet"):
        pq.write_table(rows, directory / name)
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), directory / "twice.parquet")
    either = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1]), pa.array(["a"])])
    bad = pa.array([b"a", b"\xff"]).view(pa.string())
    for name, table in {
        "union.arrow": pa.table({"text": ["a"], "either": either}),
        "bytes.arrow": pa.table({"text": bad}),
    }.items():
        with pa.ipc.new_file(str(directory / name), table.schema) as writer:
            writer.write_table(table)
    for name, values in {"drift/0": ["1"], "drift/1": [1], "wide/0": [2**60 + 1], "wide/1": [0.5]}.items():
        pq.write_table(pa.table({"text": ["a"], "n": values}), directory / f"{name}.parquet")
    for name, content in {
        "unknown.toml": '[source]\npath = "x"\ncolum = "text"\n',
        "broken.toml": "[source\n",
        "lines.jsonl": '{"text": "a"}\n[1]\n',
        "mixed/1.jsonl": '{"text": "a"}\n',
        "data.bin": "0101",
        "empty.parquet": "",
        "unknown/config.json": json.dumps({"model_type": "lama", "architectures": ["LamaForCausalLM"]}),
        "encoder/config.json": json.dumps({"model_type": "bert", "architectures": ["BertModel"]}),
        "bare/config.json": (checkpoint / "config.json").read_text(),
        "pickled/config.json": (checkpoint / "config.json").read_text(),
        "pickled/pytorch_model.bin": "pickle",
        "torn/job.json": "{",
    }.items():
        (directory / name).write_text(content)
