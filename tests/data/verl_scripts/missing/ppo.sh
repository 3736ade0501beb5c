# PPO with a critic, two data sets, everything in arrays.
set -xeuo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
CRITIC_MODEL=${CRITIC_MODEL:-$MODEL}
TOKENS=$((2 * 8192))

DATA=(
    algorithm.adv_estimator=gae
    algorithm.gamma=1.0
    algorithm.lam=0.95
    data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
    data.val_files="['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']"
    data.train_batch_size=1024
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${TOKENS}
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=1
)
CRITIC=(  # its optimizer is ten times as fast
    critic.model.path="$CRITIC_MODEL"
    critic.model.use_remove_padding=True
    critic.optim.lr=2e-5
    critic.use_dynamic_bsz=True
    critic.ppo_max_token_len_per_gpu=${TOKENS}
    critic.cliprange_value=0.5
    critic.fsdp.param_offload=False
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "${CRITIC[@]}" \
    trainer.critic_warmup=5 \
    trainer.logger='["console"]' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=15
