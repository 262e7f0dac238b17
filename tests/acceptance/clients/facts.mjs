// What the scripts for the Node `openai` SDK share: facts of a call or its exception, and the scenarios that are run.
//
//     node SCRIPT BASE KEY USER [SCENARIO...]
//
// BASE is the router without `/v1`. A scenario reports plain facts as one JSON line; judging them is the caller's work.

export const [BASE, KEY, USER, ...CHOSEN] = process.argv.slice(2);
export const clock = () => Number(process.hrtime.bigint()) / 1e9;
export const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

const lineage = (error) => {
  const names = [];
  for (let kind = Object.getPrototypeOf(error); kind && kind.constructor !== Object; kind = Object.getPrototypeOf(kind))
    names.push(kind.constructor.name);
  return names;
};

export const failed = (error) => ({
  error: lineage(error),
  status_code: error.status ?? null,
  code: error.code ?? null,
  type: error.type ?? null,
  param: error.param ?? null,
  message: error.error?.message ?? error.message,
  request_id: error.requestID ?? null,
});

export const tried = async (call) => {
  const began = clock();
  let result;
  try {
    result = await call();
  } catch (error) {
    result = failed(error);
  }
  return { ...result, seconds: clock() - began };
};

// Waits until a call runs on a node, as the router counts it.
export const untilBusy = async (node) => {
  const sample = `ebbtide_node_running{node="${node}",workload="interactive"} 1.0`;
  const until = clock() + 5;
  while (!(await (await fetch(`${BASE}/metrics`)).text()).includes(sample)) {
    if (clock() > until) throw new Error(`no call reached ${node}`);
    await pause(0.02);
  }
};

export const each = async (names, call) => {
  const facts = {};
  for (const name of names) facts[name] = await call(name);
  return facts;
};

export const run = async (scenarios) => {
  for (const name of CHOSEN.length ? CHOSEN : Object.keys(scenarios)) {
    let result;
    try {
      result = await scenarios[name]();
    } catch (error) {
      result = { broke: `${error?.name}: ${error?.message}` };
    }
    console.log(JSON.stringify({ scenario: name, result }));
  }
  process.exit(0);
};
