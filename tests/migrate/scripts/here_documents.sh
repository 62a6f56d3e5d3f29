NAME=${REWARD:-em}
cat > "$NAME.yaml" <<EOF1
reward: {name: "$NAME", note: it's "quoted" (or not}
EOF1
cat <<'EOF2' >> run.py
import os; print("python3 -m verl.trainer.main_ppo fake=1")
EOF2
read_me=$(cat <<EOF3
$NAME
EOF3
)
python3 - <<-EOF4
	print("it's $NAME")
	EOF4
python3 -m verl.trainer.main_ppo reward.config=$NAME.yaml data.train_files='a b.parquet' <<< "nothing"
