<#
.SYNOPSIS
Sandkasten in WSL 2, from Windows. docs/wsl2.md explains what is needed and why.

.DESCRIPTION
ensure   brings the distribution, systemd and the packages
install  puts the wheel below /opt/sandkasten, with systemd services
start    starts the services, and keeps the distribution running
status   shows the distribution, the services and whether the daemon answers

.EXAMPLE
.\sandkasten-wsl.ps1 ensure
.\sandkasten-wsl.ps1 install -Wheel .\sandkasten_runtime-1.0.0.dev0-py3-none-any.whl
#>
param(
    [Parameter(Mandatory)] [ValidateSet('ensure', 'install', 'start', 'status')] [string] $Action,
    [string] $Distribution = 'Debian',
    [string] $Wheel
)
$ErrorActionPreference = 'Stop'
$env:WSL_UTF8 = '1'  # else wsl.exe writes its own lines in UTF-16
$Services = 'sandkasten-nsinit sandkasten'

# Runs one line of bash as root. Without double quotes in it: Windows PowerShell would drop them.
function Invoke-Linux([string] $Line) {
    wsl.exe --distribution $Distribution --user root --cd / --exec bash -euc $Line
    if ($LASTEXITCODE -ne 0) { throw "this failed in ${Distribution}: $Line" }
}

function Initialize-Distribution {
    wsl.exe --version | Out-Null
    if ($LASTEXITCODE -ne 0) { throw 'there is no WSL: run "wsl --install --no-distribution" and restart Windows' }
    if ((wsl.exe --list --quiet) -notcontains $Distribution) {
        wsl.exe --install --distribution $Distribution --no-launch
        if ($LASTEXITCODE -ne 0) { throw "$Distribution could not be installed" }
    }
    Invoke-Linux 'case $(uname -r) in *WSL2*) ;; *) echo this is not WSL 2 >&2; exit 1;; esac'
    Invoke-Linux 'grep -qs ^systemd=true /etc/wsl.conf || printf ''\n[boot]\nsystemd=true\n'' >> /etc/wsl.conf'
    # wsl.conf is read at the next start. A distribution that systemd runs already is left alone, with what runs in it.
    $isOld = Invoke-Linux 'test -d /run/systemd/system || echo without systemd'
    if ($isOld) { wsl.exe --terminate $Distribution }
    Invoke-Linux 'apt-get update -qq && apt-get install -qq -y python3-venv e2fsprogs curl'
}

function Install-Sandkasten {
    if (-not $Wheel) { throw 'name the wheel: -Wheel PATH' }
    $path = wsl.exe --distribution $Distribution --exec wslpath -a (Resolve-Path $Wheel).Path.Replace('\', '/')
    if ($LASTEXITCODE -ne 0) { throw "$Wheel can't be seen in $Distribution" }
    Invoke-Linux 'python3 -m venv /opt/sandkasten/.venv'
    Invoke-Linux "/opt/sandkasten/.venv/bin/pip install --quiet '${path}[server,mcp]'"
    Invoke-Linux '/opt/sandkasten/.venv/bin/sandkasten install-service'
    Invoke-Linux '/opt/sandkasten/.venv/bin/sandkasten doctor'
}

function Start-Sandkasten {
    # A service keeps no distribution running; a process that a user started does.
    $keep = '--distribution', $Distribution, '--user', 'root', '--exec', 'sleep', 'infinity'
    Start-Process -WindowStyle Hidden -FilePath wsl.exe -ArgumentList $keep
    Invoke-Linux "systemctl enable --now $Services"
    Invoke-Linux 'echo listening on http://localhost:8080, the API key is in /var/lib/sandkasten/api-key'
}

function Show-Status {
    wsl.exe --list --verbose
    Invoke-Linux "systemctl --no-pager --lines 3 status $Services || true"
    Invoke-Linux 'curl -sS http://127.0.0.1:8080/healthz'
}

switch ($Action) {
    'ensure' { Initialize-Distribution }
    'install' { Install-Sandkasten }
    'start' { Start-Sandkasten }
    'status' { Show-Status }
}
