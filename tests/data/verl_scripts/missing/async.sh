# GRPO with generation on devices of its own: two optimizer steps per weight update, token TIS.
N_TRAIN=4
N_ROLLOUT=4
export HYDRA_FULL_ERROR=1
RAY_DEDUP_LOGS=0 python3 -m verl.trainer.main_ppo \
    trainer.use_v1=True \
    trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=2 \
    trainer.v1.separate_async.num_warmup_batches=1 \
    trainer.v1.sampler.max_off_policy_threshold=4 \
    trainer.v1.sampler.max_off_policy_strategy=drop \
    transfer_queue.enable=True \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=128 data.gen_batch_size=1 \
    data.max_prompt_length=512 data.max_response_length=2048 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node=$N_ROLLOUT \
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    trainer.n_gpus_per_node=$N_TRAIN trainer.nnodes=1 \
    trainer.total_training_steps=100
