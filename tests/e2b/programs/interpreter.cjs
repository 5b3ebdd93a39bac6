// E2B's code interpreter SDK for JavaScript as published, against a server of ours: each scenario prints what came of it
// as a line of JSON. The scenarios and what they print are those of interpreter.py.

const { Sandbox } = require('@e2b/code-interpreter')

const PLOT = `
import matplotlib.pyplot as plt
plt.plot([0, 1], [1, 3], label="a")
plt.title("T"); plt.xlabel("time (s)")
plt.show()
`
const SHOWN = `
from IPython.display import HTML, JSON, Latex, Markdown, SVG, display
class Own:
    def _repr_mimebundle_(self, **_):
        return {"text/plain": "own", "application/x-own": "1"}
    def _repr_e2b_data_(self):
        return {"a": 1}
display(HTML("<b>"), Markdown("*m*"), Latex("$l$"), JSON({"a": [1]}), SVG("<svg/>"), Own())
`

async function caught(call) {
  try {
    await call()
  } catch (error) {
    return error.constructor.name
  }
  return null
}

async function* texts(box) {
  const heard = []
  const code = "import sys; print('é'); print('e', file=sys.stderr); 'm'"
  const ran = await box.runCode(code, { onStdout: (line) => heard.push(line.line) })
  yield ['text', [ran.text, ran.logs.stdout, ran.logs.stderr, heard, ran.error ?? null, ran.executionCount]]
  await box.runCode('x = 1')
  yield ['state', (await box.runCode('x + 1')).text]
  const printed = (await box.runCode('!id -un; pwd; echo $HOME')).logs.stdout
  yield ['program', printed.join('').split(/\s+/).filter(Boolean).join(' ')]
  await box.files.write('json.py', 'raise SystemExit')
  const failed = (await box.runCode('print(1)\n1 / 0')).error
  yield ['error', [failed.name, failed.value, failed.traceback.includes('ZeroDivisionError')]]
  const env = "import os; os.environ.get('A')"
  const told = [(await box.runCode(env, { envs: { A: 'here' } })).text, (await box.runCode(env)).text ?? null]
  yield ['variables', [...told, (await box.runCode("os.environ['B']")).text]]
  let large = await box.runCode("print('x' * 3_000_000)")
  yield ['large output', large.logs.stdout.join('').length]
  large = await box.runCode("'x' * 9_000_000")
  yield ['too large a result', [large.results.length, large.logs.stderr[0].slice(0, 40)]]
}

async function* shows(box) {
  const plot = (await box.runCode(PLOT)).results[0]
  const chart = plot.chart
  yield ['plot', [plot.png.slice(0, 11), chart.type, chart.title, chart.x_unit, chart.elements[0].points]]
  const ran = await box.runCode(SHOWN)
  const formats = (each) => [...each.formats(), ...Object.keys(each.raw.extra ?? {})].filter((name) => name !== 'text')
  yield ['formats', ran.results.map((each) => formats(each).sort())]
  const own = ran.results.at(-1)
  yield ['own', [own.text, own.data]]
}

async function* contexts(box) {
  await box.runCode('x = 1')
  await box.files.makeDir('w')
  const other = await box.createCodeContext({ cwd: '/home/user/w' })
  const run = (code) => box.runCode(code, { context: other })
  yield ['context', [other.language, other.cwd, (await run('import os; os.getcwd()')).text]]
  yield ['apart', (await run('x')).error.name]
  const listed = await box.listCodeContexts()
  yield ['listed', [listed.length, listed.some((each) => each.id === other.id), await box.commands.list()]]
  await run('y = 1')
  await box.restartCodeContext(other)
  yield ['restarted', (await run('y')).error.name]
  const died = await run('import os; os._exit(3)')
  yield ['died', [died.error.name, (await run('1 + 1')).text]]
  await box.removeCodeContext(other.id)
  yield [
    'refused',
    [
      await caught(() => run('1')),
      await caught(() => box.runCode('1', { language: 'r' })),
      await caught(() => box.createCodeContext({ cwd: '/no-such' })),
      await caught(() => box.restartCodeContext('no-such')),
      await caught(() => box.removeCodeContext('no-such')),
    ],
  ]
}

async function* interrupts(box) {
  const endless = "import time\nprint('on')\nwhile True: time.sleep(0.01)"
  const timedOut = await caught(() => box.runCode(endless, { timeoutMs: 1000 }))
  yield ['time limit', [timedOut, (await box.runCode("'goes on'")).text]]
}

async function main() {
  const box = await Sandbox.create({ envs: { B: 'b' } })
  try {
    for (const scenario of [texts, shows, contexts, interrupts]) {
      for await (const [name, value] of scenario(box)) console.log(JSON.stringify({ name, value }))
    }
  } finally {
    await box.kill()
  }
}

// The SDK leaves a timer of a minute behind each call that fails.
main().then(
  () => process.exit(0),
  (error) => {
    console.error(error)
    process.exit(1)
  },
)
