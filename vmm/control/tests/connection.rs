//! Both sides of the operator's socket, friendly and hostile.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};

use vmm_control::{
    Client, ClientError, Connection, EndpointInfo, EndpointsReply, ErrorCode, ErrorReply, Interest, MAX_REQUEST, Reply,
    Request, TenantsReply,
};

fn pair() -> (Connection, UnixStream) {
    let (server, client) = UnixStream::pair().unwrap();
    (Connection::new(server).unwrap(), client)
}

fn nothing(_: Request) -> Reply {
    Reply::Tenants(TenantsReply { tenants: Vec::new() })
}

#[allow(clippy::needless_pass_by_value, reason = "has the shape of an answer")]
fn unreachable(request: Request) -> Reply {
    panic!("{request:?} was answered")
}

/// An answer that no socket buffer holds.
fn large(_: Request) -> Reply {
    let endpoint = EndpointInfo {
        tenant: "t".repeat(1000),
        endpoint: 0,
        name: "gpu0".into(),
        device: "gpu0".into(),
        kind: "gpu".into(),
        memory: 1,
        engines: 1,
        bandwidth: 0,
        latency_ns: 0,
        staged_to: Vec::new(),
        peers: Vec::new(),
    };
    Reply::Endpoints(EndpointsReply { endpoints: vec![endpoint; 2000] })
}

/// The code of the error that the server answers with before it closes.
fn error_code(line: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!((&value["version"], &value["reply"]), (&1.into(), &"error".into()));
    assert!(value["message"].as_str().is_some_and(|message| !message.is_empty()));
    value["code"].as_str().unwrap().to_owned()
}

#[test]
fn a_request_in_pieces_is_answered_once_it_is_whole() {
    let (mut server, mut client) = pair();
    let request = b"{\"version\":1,\"request\":\"tenants\"}\n";
    for byte in &request[..request.len() - 1] {
        client.write_all(&[*byte]).unwrap();
        assert_eq!(server.advance(unreachable), Interest::Read);
    }
    client.write_all(b"\n").unwrap();
    assert_eq!(server.advance(nothing), Interest::Read);
    let mut answer = [0; 100];
    let count = client.read(&mut answer).unwrap();
    assert_eq!(&answer[..count], b"{\"version\":1,\"reply\":\"tenants\",\"tenants\":[]}\n");
}

#[test]
fn requests_sent_together_are_answered_one_a_turn() {
    let (mut server, mut client) = pair();
    client.write_all(&b"{\"version\":1,\"request\":\"tenants\"}\n".repeat(3)).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut turns = 0;
    while server.advance(|request| {
        turns += 1;
        nothing(request)
    }) != Interest::Close
    {}
    drop(server);
    let mut answers = String::new();
    client.read_to_string(&mut answers).unwrap();
    assert_eq!((turns, answers.lines().count()), (3, 3));
}

#[test]
fn nonsense_is_answered_with_its_reason_and_ends_the_connection() {
    let cases: [(&[u8], &str); 6] = [
        (b"\n", "malformed"),
        (b"\xff\xfe\n", "malformed"),
        (b"{\"version\":1,\"request\":\"reboot\"}\n", "malformed"),
        (b"{\"request\":\"status\"}\n", "malformed"),
        (b"{\"version\":2,\"request\":\"unheard of\"}\n", "version"),
        (&[b'['; MAX_REQUEST + 100], "too_long"),
    ];
    for (sent, code) in cases {
        let (mut server, mut client) = pair();
        client.write_all(sent).unwrap();
        assert_eq!(server.advance(unreachable), Interest::Close, "{code}");
        drop(server);
        let mut answer = String::new();
        // The rest of an overlong request was never read: the answer is followed by a reset.
        let _ = client.read_to_string(&mut answer);
        assert_eq!(error_code(&answer), code);
    }
}

#[test]
fn a_client_that_does_not_read_holds_one_answer_and_nobody_up() {
    let (mut server, mut client) = pair();
    let request = b"{\"version\":1,\"request\":\"endpoints\"}\n";
    client.write_all(&request.repeat(2)).unwrap();
    assert_eq!(server.advance(large), Interest::Write);
    for _ in 0..10 {
        assert_eq!(server.advance(unreachable), Interest::Write);
    }
    let reader = std::thread::spawn(move || {
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    });
    let mut answered = 1;
    while answered < 2 || server.advance(unreachable) != Interest::Read {
        server.advance(|request| {
            answered += 1;
            large(request)
        });
    }
    drop(server);
    let answer = reader.join().unwrap();
    assert_eq!(answer.lines().count(), 2);
    assert!(answer.len() > 4_000_000);
}

#[test]
fn a_client_that_goes_at_any_point_ends_its_connection_only() {
    let (mut server, client) = pair();
    drop(client);
    assert_eq!(server.advance(unreachable), Interest::Close);

    let (mut server, mut client) = pair();
    client.write_all(b"{\"version\":1,").unwrap();
    drop(client);
    assert_eq!(server.advance(unreachable), Interest::Read);
    assert_eq!(server.advance(unreachable), Interest::Close);

    let (mut server, mut client) = pair();
    client.write_all(b"{\"version\":1,\"request\":\"endpoints\"}\n").unwrap();
    drop(client);
    assert_eq!(server.advance(large), Interest::Close);

    let (mut server, mut client) = pair();
    client.write_all(b"{\"version\":1,\"request\":\"endpoints\"}\n").unwrap();
    assert_eq!(server.advance(large), Interest::Write);
    drop(client);
    assert_eq!(server.advance(unreachable), Interest::Close);
}

#[test]
fn client_and_server_understand_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let mut connection = Connection::new(listener.accept().unwrap().0).unwrap();
        let refuse = |request: Request| match request {
            Request::Faults { .. } => {
                Reply::Error(ErrorReply { code: ErrorCode::UnknownTenant, message: "There is no tenant \"x\"".into() })
            }
            request => nothing(request),
        };
        while connection.advance(refuse) != Interest::Close {
            std::thread::yield_now();
        }
    });
    let mut client = Client::connect(&path).unwrap();
    assert_eq!(client.ask(&Request::Tenants).unwrap(), nothing(Request::Tenants));
    let error = client.ask(&Request::Faults { tenant: Some("x".into()), last: None, since: None }).unwrap_err();
    assert!(matches!(&error, ClientError::Refused { reply } if reply.code == ErrorCode::UnknownTenant));
    assert_eq!(error.to_string(), "There is no tenant \"x\"");
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_server_that_hangs_up_or_talks_nonsense_is_an_error() {
    let ask = |answer: &'static [u8]| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let count = stream.read(&mut [0; MAX_REQUEST]).unwrap();
            assert!(count > 0);
            stream.write_all(answer).unwrap();
        });
        let error = Client::connect(&path).unwrap().ask(&Request::Status).unwrap_err();
        server.join().unwrap();
        error
    };
    assert!(matches!(ask(b""), ClientError::Broken { .. }));
    assert!(matches!(ask(b"{\"version\":1,"), ClientError::Broken { .. }));
    assert!(matches!(ask(b"HTTP/1.1 400 Bad Request\n"), ClientError::Malformed { .. }));
    assert!(matches!(ask(b"{\"version\":9,\"reply\":\"new\"}\n"), ClientError::Version { theirs: 9 }));
    assert!(matches!(Client::connect("/nowhere".as_ref()), Err(ClientError::Connect { .. })));
}
