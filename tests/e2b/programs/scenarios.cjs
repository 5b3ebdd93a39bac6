// E2B's JavaScript SDK as published, against a server of ours: each scenario prints what came of it as a line of JSON.
// The scenarios and what they print are those of scenarios.py.

const { createHash } = require('node:crypto')
const { get } = require('node:http')
const { Sandbox, CommandExitError, TimeoutError } = require('e2b')

const PATIENCE_MS = 60_000
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

async function caught(call) {
  try {
    await call()
  } catch (error) {
    return error.constructor.name
  }
  return null
}

async function until(condition) {
  const deadline = Date.now() + PATIENCE_MS
  while (!(await condition())) {
    if (Date.now() > deadline) throw new Error(`never: ${condition}`)
    await sleep(50)
  }
}

async function* commands(box) {
  const run = (text, options) => box.commands.run(text, options)
  const ended = async (text) => {
    try {
      const result = await run(text)
      return [result.exitCode, result.error ?? null]
    } catch (error) {
      if (!(error instanceof CommandExitError)) throw error
      return [error.exitCode, error.error]
    }
  }
  const first = await run('echo hi $X; echo e >&2')
  yield ['run', [first.stdout, first.stderr, first.exitCode]]
  const exits = []
  for (const text of ['exit 3', 'exit 137', 'kill -9 $$', 'no-such-program']) exits.push(await ended(text))
  yield ['exits', exits]
  yield ['users', [(await run('id -un; pwd')).stdout, (await run('id -un; pwd', { user: 'root' })).stdout]]
  yield ['closed input', (await run('readlink /proc/self/fd/0')).stdout]
  yield ['large output', (await run("head -c 3000000 /dev/zero | tr '\\0' a")).stdout.length]
  try {
    await run('sleep 1000', { timeoutMs: 1000 })
  } catch (error) {
    if (!(error instanceof TimeoutError)) throw error
  }
  await until(async () => (await box.commands.list()).length === 0)
  yield ['time limit', 'ended']
  yield [
    'refused commands',
    [
      await caught(() => run('true', { cwd: '/no-such' })),
      await caught(() => run('true', { user: 'nobody-there' })),
      await caught(() => run('true ' + 'x'.repeat(200_000))),
    ],
  ]
}

async function* processes(box) {
  let handle = await box.commands.run('cat; echo over', { background: true, stdin: true })
  const listed = (await box.commands.list()).map((each) => [each.cmd, each.args, each.pid === handle.pid])
  const again = await box.commands.connect(handle.pid)
  await box.commands.sendStdin(handle.pid, 'line\n')
  await box.commands.closeStdin(handle.pid)
  yield ['background', [listed, (await handle.wait()).stdout, (await again.wait()).stdout]]
  handle = await box.commands.run('sleep 1000', { background: true })
  const killed = [await box.commands.kill(handle.pid), await box.commands.kill(999_999)]
  try {
    await handle.wait()
  } catch (error) {
    killed.push(error.exitCode, error.error)
  }
  yield ['kill', killed]
  const seen = []
  const terminal = await box.pty.create({ rows: 10, cols: 40, onData: (data) => seen.push(Buffer.from(data)) })
  await box.pty.resize(terminal.pid, { rows: 20, cols: 50 })
  await box.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit 5\n'))
  try {
    await terminal.wait()
  } catch (error) {
    yield ['terminal', [Buffer.concat(seen).includes('20 50'), error.exitCode]]
  }
}

async function* files(box) {
  const fs = box.files
  const written = await fs.write('a/b.txt', 'é\n')
  const several = await fs.write([
    { path: 'c/1', data: '1' },
    { path: '/tmp/ü x', data: new Uint8Array([0, 255]).buffer },
  ])
  yield ['write', [written.path, written.name, several.map((each) => each.path)]]
  yield ['read', [await fs.read('a/b.txt'), [...(await fs.read('/tmp/ü x', { format: 'bytes' }))]]]
  const large = Buffer.alloc(256 * 8000, Buffer.from([...Array(256).keys()]))
  const digest = (data) => createHash('sha256').update(data).digest('hex')
  const same = []
  for (const gzip of [false, true]) {
    await fs.write('large', new Blob([large]), { gzip })
    same.push(digest(await fs.read('large', { format: 'bytes' })) === digest(large))
  }
  const pieces = []
  for await (const piece of await fs.read('large', { format: 'stream' })) pieces.push(piece)
  yield ['large file', [...same, Buffer.concat(pieces).equals(large)]]
  const made = [await fs.makeDir('d/e'), await fs.makeDir('d/e')]
  const renamed = await fs.rename('c/1', 'new/sub/2')
  await box.commands.run('ln -s a/b.txt link; chmod 640 a/b.txt')
  const entries = new Map((await fs.list('/home/user', { depth: 2 })).map((each) => [each.path, each]))
  const [link, plain] = [entries.get('/home/user/link'), entries.get('/home/user/a/b.txt')]
  yield ['tree', [made, renamed.path, entries.has('/home/user/new/sub/2'), entries.has('/home/user/new/sub')]]
  yield ['link', [link.type, link.symlinkTarget]]
  yield ['entry', [plain.type, plain.size, plain.mode, plain.permissions, plain.owner]]
  const there = await fs.exists('d')
  await fs.remove('d')
  yield ['removed', [there, null, await fs.exists('d')]]
  await fs.write('/etc/of-root', '1', { user: 'root' })
  yield ['owner', (await fs.getInfo('/etc/of-root')).owner]
  const calls = [
    () => fs.read('none'),
    () => fs.list('none'),
    () => fs.list('a/b.txt'),
    () => fs.makeDir('a/b.txt'),
    () => fs.remove('none'),
    () => fs.rename('none', 'else'),
    () => fs.write('/etc/passwd', '1'),
  ]
  const names = []
  for (const call of calls) names.push(await caught(call))
  yield ['refused files', names]
}

async function* watching(box) {
  await box.files.makeDir('w')
  const events = []
  const handle = await box.files.watchDir('w', (event) => events.push(event), { recursive: true })
  await box.commands.run('mkdir w/sub; echo 1 > w/a; mv w/a w/b; chmod 600 w/b; rm w/b; echo > w/last')
  await until(async () => events.some((event) => event.name === 'last'))
  await handle.stop()
  const told = new Set(events.map((event) => `${event.type} ${event.name}`))
  const wanted = ['chmod b', 'create a', 'create b', 'create sub', 'remove b', 'rename a']
  yield ['watch', wanted.filter((each) => told.has(each))]
  yield ['watch nothing', await caught(() => box.files.watchDir('none', () => {}))]
}

async function* signed(box) {
  await box.files.write('sig ned.txt', 'signed')
  const url = await box.downloadUrl('sig ned.txt', { useSignatureExpiration: 1000 })
  yield ['signed', await (await fetch(url)).text()]
  const form = new FormData()
  form.append('file', new Blob(['sent']), 'sent.txt')
  const answer = await fetch(await box.uploadUrl('sent.txt'), { method: 'POST', body: form })
  yield ['signed upload', [answer.status, await box.files.read('sent.txt')]]
  const statuses = []
  for (const bad of [url.replace('=v1_', '=v1_A'), url.replace('ned', 'nee'), url.slice(0, -1) + (url.endsWith('1') ? '2' : '1')]) {
    statuses.push((await fetch(bad)).status)
  }
  yield ['badly signed', statuses]
}

async function* repository(box) {
  const git = box.git
  await git.init('repo', { initialBranch: 'main' })
  await git.configureUser('A', 'a@example.org')
  await box.files.write('repo/f', '1')
  const before = await git.status('repo')
  await git.add('repo')
  await git.commit('repo', 'one')
  const after = await git.status('repo')
  yield ['git', [before.isClean, after.isClean, after.currentBranch]]
}

function fetchByName(host, headers) {
  const options = { host: '127.0.0.1', port: host.split(':')[1], headers: { host, ...headers }, agent: false }
  return new Promise((resolve, reject) => {
    get(options, (answer) => resolve(answer.resume().statusCode)).on('error', reject)
  })
}

async function* ports(box) {
  const closed = await Sandbox.create({ network: { allowPublicTraffic: false } })
  const token = { 'E2B-Traffic-Access-Token': closed.trafficAccessToken }
  const statuses = [await fetchByName(box.getHost(8000), {})]
  for (const each of [box, closed]) {
    await each.commands.run('python3 -m http.server 8000', { background: true })
    await each.commands.run('until (: </dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done')
    for (const headers of [{}, token]) statuses.push(await fetchByName(each.getHost(8000), headers))
  }
  yield ['ports', statuses]
  await closed.kill()
}

async function* control(box) {
  const info = await box.getInfo()
  const found = Sandbox.list({ query: { metadata: { 'a b': 'c&d é' } } })
  const others = Sandbox.list({ query: { metadata: { 'a b': 'c' } } })
  yield ['info', [info.templateId, info.metadata, info.state, info.cpuCount, info.memoryMB]]
  yield ['list', [(await found.nextItems()).length, (await others.nextItems()).length]]
  const metrics = (await box.getMetrics()).map((each) => each.memTotal).slice(-1)
  yield ['metrics', [...metrics, await box.getMetrics({ end: new Date(1_000_000) })]]
  await box.setTimeout(1_000_000)
  const left = (await box.getInfo()).endAt - info.startedAt
  yield ['timeout', 1_000_000 <= left && left < 1_000_000 + PATIENCE_MS]
  await Sandbox.connect(box.sandboxId, { timeoutMs: 10_000 })
  yield ['connect shortens nothing', (await box.getInfo()).endAt - info.startedAt === left]
}

async function* pausing(box) {
  await box.files.write('kept', 'kept')
  const paused = [await box.pause(), await box.pause(), await box.isRunning()]
  const state = (await box.getInfo()).state
  const error = await caught(() => box.commands.run('true'))
  const other = await Sandbox.connect(box.sandboxId, { timeoutMs: 600_000 })
  yield ['pause', [...paused, state, error, await other.isRunning(), await box.files.read('kept')]]
  const mine = await Sandbox.create({ timeoutMs: 2000, lifecycle: { onTimeout: 'pause', autoResume: true } })
  await until(async () => (await mine.getInfo()).state === 'paused')
  const result = await mine.commands.run('echo awake')
  const info = await mine.getInfo()
  yield ['pause at the end', [result.stdout, info.state, info.lifecycle.onTimeout]]
  await mine.kill()
}

async function* refused(box) {
  const calls = [
    () => Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }),
    () => Sandbox.create('no-such-template'),
    () => Sandbox.connect('0123456789abcdef01234567'),
    () => box.createSnapshot(),
    () => Sandbox.create({ metadata: { 'e2b.template': 'mine' } }),
  ]
  const names = []
  for (const call of calls) names.push(await caught(call))
  yield ['refused', names]
  const alone = await Sandbox.create({ allowInternetAccess: false })
  const pages = []
  const listed = Sandbox.list({ limit: 1 })
  while (listed.hasNext) pages.push((await listed.nextItems()).map((each) => each.sandboxId).join())
  yield ['pages', pages.filter((page) => page).join() === `${alone.sandboxId},${box.sandboxId}`]
  yield ['alone', [(await alone.getInfo()).allowInternetAccess, await alone.kill()]]
  const reaches = []
  for (const network of [{ denyOut: ['0.0.0.0/0'] }, {}]) {
    await box.updateNetwork(network)
    reaches.push((await box.getInfo()).allowInternetAccess)
  }
  yield ['another network', reaches]
}

async function* dying(box) {
  const handle = await box.commands.run('sleep 1000', { background: true })
  const waiting = caught(() => handle.wait())
  const killed = await box.kill()
  const error = await waiting
  const after = [await box.isRunning(), await box.kill(), await caught(() => box.commands.run('true'))]
  yield ['killed', [killed, error, ...after]]
}

async function main() {
  const box = await Sandbox.create({ metadata: { 'a b': 'c&d é' }, envs: { X: '1' } })
  for (const part of [commands, processes, files, watching, signed, repository, ports, control, pausing, refused, dying]) {
    for await (const [name, value] of part(box)) console.log(JSON.stringify({ name, value }))
  }
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
